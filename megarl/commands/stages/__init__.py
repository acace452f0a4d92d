"""Sealed stages that are packed, shared and unpacked, or filled with responses from other systems."""
