"""Small things every room needs: config, command line, process group, log, timing. Knows no other room."""
