"""What starts processes and watches them."""
