"""What the processes of a phase run: ``python -m megarl.phases.<phase> RUN_DIR STAGE`` under the launcher."""
