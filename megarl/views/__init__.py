"""What a person reads: plan, progress, report, doctor."""
