from shoestring.commands.cli import main

main()
