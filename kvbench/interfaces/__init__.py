"""The interfaces of methods, allocators, codecs and tasks: everything that the author of one reads."""
