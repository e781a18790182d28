"""The registry that is conf/, and the hash of the sources that a run is made with."""
