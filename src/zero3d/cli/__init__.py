"""The command line: one small file per verb, each imported only when it is typed."""
