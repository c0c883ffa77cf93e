"""What a process tells an operator in numbers: which metrics there are, how they are kept, where they can be read.

Code that decides knows nothing of this package: the rooms' ``metrics`` modules read its snapshots or stand in front of
its ports, and the composition roots put them there.
"""
