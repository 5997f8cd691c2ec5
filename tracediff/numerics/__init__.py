"""What each kind of op computes, how engines round it, and how far honest arithmetic can be from exact."""
