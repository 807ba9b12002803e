"""One file per schedule, and nothing but schedules."""
