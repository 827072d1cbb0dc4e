"""What a user can say: options of a run and of each command, config files, argv."""
