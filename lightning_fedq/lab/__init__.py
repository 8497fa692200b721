"""The lab: audits, attacks, the bench, studies of many runs. Nothing outside of it imports it."""
