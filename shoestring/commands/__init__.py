"""The command line: its parser, the table of commands, and commands that are about all rooms.

Help, a wrong flag and a misspelt technique are answered in milliseconds: what is imported at the top of a file of a command or its options
is light, and torch, pathlib, typing, dataclasses, json and the like are imported inside the functions that need them.
"""
