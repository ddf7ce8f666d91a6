"""What a million consumed groups cost the next lease."""
