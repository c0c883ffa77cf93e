"""One module per peer, run by that peer's own interpreter; standard library and the peer only."""
