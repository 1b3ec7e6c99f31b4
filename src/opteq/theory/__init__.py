"""The problem that an equilibrium solves, and what follows from it."""
