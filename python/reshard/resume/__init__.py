"""What a restarted run goes on from: pure decisions, facts in and a decision out. No disk, no clock, no environment."""
