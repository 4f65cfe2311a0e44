"""The life of a process: start and launch, device, signals, hangs, failures, end."""
