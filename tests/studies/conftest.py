from tests.support.garbage import no_garbage_of_others  # noqa: F401 - a fixture of every test here
