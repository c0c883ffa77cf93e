"""A whole cluster on this machine: what ``kev up`` runs.

Read in this order: ``commands`` (what a process is started as, here, in compose and in Kubernetes), ``plan`` (which
processes, in which order), ``lifecycle`` (states of one process and when it is started again), ``child`` and
``supervisor`` (the real processes), ``screen`` (what the terminal shows), ``run`` (all of it together).
"""
