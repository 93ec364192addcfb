"""What leaves a device and what it is given, in fewer bytes: codecs that wrap one another, and state the error that they make."""
