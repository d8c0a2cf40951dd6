"""Whether a request gives the same bits in any company and by any path."""
