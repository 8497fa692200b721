"""Privacy accounting: report, target, plan and ledger of the privacy of a run."""
