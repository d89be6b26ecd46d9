"""What is right and what is slow: doctor, inspect, plans, verify, profile, and servers' answers."""
