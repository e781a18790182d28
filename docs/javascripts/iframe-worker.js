// Search in a site that is opened from disk. A browser starts no worker from a file, so there the search's worker runs in a
// hidden frame of the page. Material's plugin `offline` would load such a script from another host; it does not, because
// the name of this file says that there is one.

class FrameWorker extends EventTarget {
  constructor(address) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inner = frame.contentWindow;
    this.inner.document.open();
    this.inner.document.write("<html><body></body></html>");
    this.inner.document.close();
    this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = this.inner.document.createElement("script");
    script.src = new URL(address, location.href).href;
    this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
    this.inner.document.body.append(script);
  }

  postMessage(data) {
    this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
