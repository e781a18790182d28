"""The common base of methods and allocators: classes whose hooks a subclass may override."""


class Hooks:
    """Base of an interface whose methods are hooks with a default.

    kvbench asks which hooks a subclass overrides. A hook that is not overridden needs no guard, and it may allow a
    faster way.
    """

    def overrides(self, *hooks: str) -> bool:
        """Return whether the object's class overrides at least one of the hooks with these names."""
        interface = next(own for own in type(self).__mro__ if Hooks in own.__bases__)
        return any(getattr(type(self), hook) is not getattr(interface, hook) for hook in hooks)
