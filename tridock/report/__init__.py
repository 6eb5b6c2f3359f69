"""Tables, charts and pages from plans, runs and Megatron logs. No torch."""
