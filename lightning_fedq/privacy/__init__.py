"""What was protected, from whom, at which price: accounting, report, ledger, audit."""
