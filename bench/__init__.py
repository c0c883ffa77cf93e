"""Side-by-side measurements; numbers to the terminal and to files, never a gate."""
