"""Communication between processes: process group, rendezvous, small collectives, network interfaces."""
