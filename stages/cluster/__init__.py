"""Ray, engines and trainers: warm state behind the stages."""
