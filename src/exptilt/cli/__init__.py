"""The `exptilt` command: one file a subcommand, loaded only when it is called."""
