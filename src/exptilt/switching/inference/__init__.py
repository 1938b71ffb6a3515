"""What is known of modes and states given data: filters, smoothers, forecasts, likely paths and draws."""
