"""Tables for recommenders: files, categorical columns, click logs and event sequences."""
