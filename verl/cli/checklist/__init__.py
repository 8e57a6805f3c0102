"""What `verl check` looks at, in order. One file a topic; each check yields lines and may raise VerlError."""
