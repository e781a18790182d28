"""What a method, an allocator, a codec and a task are: all that the author of one reads."""
