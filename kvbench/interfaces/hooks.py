"""What methods and allocators have in common: hooks that a subclass may override."""


class Hooks:
    """Base of an interface whose methods are hooks with a default. kvbench asks which of them a subclass overrides: a
    hook that is left as it is need not be called through a guard, and may allow a faster way.
    """

    def overrides(self, *hooks: str) -> bool:
        """Whether the object's class has its own version of one of these hooks of the interface."""
        interface = next(own for own in type(self).__mro__ if Hooks in own.__bases__)
        return any(getattr(type(self), hook) is not getattr(interface, hook) for hook in hooks)
