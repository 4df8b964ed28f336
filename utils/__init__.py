"""What every room needs: settings, command line, errors, log, seeding, process group. Imports no other room."""
