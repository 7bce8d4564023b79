"""Child processes and tasks that live as long as their process."""
