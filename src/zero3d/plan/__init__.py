"""The planner: pure arithmetic about memory, traffic and time. Imports no torch."""
