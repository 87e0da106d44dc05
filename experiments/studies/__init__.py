"""The studies of the paper, and rules and a drafter that runs name as studies.MODULE:NAME."""
