"""What a run needs on devices that are not here: memory, work and time, from shapes alone."""
