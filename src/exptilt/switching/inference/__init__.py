"""Laws of modes and states given data: filters, smoothers, forecasts, most likely paths and draws."""
