"""Scripts that run inside the sandbox. They are copied into it as text, and cannot import megarl there."""
