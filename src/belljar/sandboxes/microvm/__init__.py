"""The `microvm` provider: sessions in small virtual machines of microsandbox. Refused unless a trial boot succeeds."""
