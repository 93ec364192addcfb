from shoestring.commands.main import main

main()
