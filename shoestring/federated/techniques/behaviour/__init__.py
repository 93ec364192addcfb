"""How simulated devices behave: they drop out, are slow, are malicious, at stated rates. A real device needs no help in this."""
