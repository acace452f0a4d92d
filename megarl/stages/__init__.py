"""A sealed stage on its way: packed, shared and unpacked, or made of what other systems generated."""
