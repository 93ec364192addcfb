"""The command line: its parser, the table of commands, and commands that belong to no room.

Help, a wrong flag and a misspelt technique are answered in milliseconds: files of commands and options import nothing
heavy at the top; torch, pathlib, typing, dataclasses, json and the like are imported inside the functions that need
them.
"""
