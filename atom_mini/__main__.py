"""`python -m atom_mini`: see `atom_mini.instruments.command_line`."""

from atom_mini.instruments.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
