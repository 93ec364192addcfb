"""Distillation: a student learns what a teacher says. An ordinary job whose loss knows a teacher, so the ordinary loop trains it."""
