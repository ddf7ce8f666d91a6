"""Read what a policy sampled: thoughts, text and tool calls, in the forms that models use."""
