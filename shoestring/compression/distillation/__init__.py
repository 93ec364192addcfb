"""Knowledge distillation: a student is trained towards a teacher's outputs. It is an ordinary job with another loss, so
the ordinary training loop runs it."""
