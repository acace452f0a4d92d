"""Python that runs inside the sandbox, where megarl is not: these files are read as text, and import no megarl."""
