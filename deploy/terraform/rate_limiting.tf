# Written by threshold export from the policy's edge rules; change the policy, not this file.
# Left out: edge-network: Cloudflare counts by single addresses.
# For version 4 of the provider cloudflare/cloudflare; threshold export --provider writes the other.
# Cloudflare wants cf.colo.id beside ip.src: each of its data centres counts by itself, so that an address
# whose requests reach several of them may get through as many times its limit.
# Paths are compared as they come: switch on URL normalization, or upper case and %2e dodge these rules.
# A period of a day is not on every plan: an hour is the longest that is documented.

variable "zone_id" {
  type = string
}

resource "cloudflare_ruleset" "grove_rate_limiting" {
  zone_id     = var.zone_id
  name        = "Threshold edge"
  description = "The edge rules of a Threshold policy"
  kind        = "zone"
  phase       = "http_ratelimit"

  rules {
    action = "block"
    action_parameters {
      response {
        status_code  = 429
        content      = "{\"error\":\"rate_limited\",\"retry_after\":60}"
        content_type = "application/json"
      }
    }
    ratelimit {
      characteristics     = ["cf.colo.id", "ip.src"]
      period              = 60
      requests_per_period = 1000
      mitigation_timeout  = 60
    }
    expression  = "(http.host contains \"grove.place\")"
    description = "edge: 1000/min by ip"
    enabled     = true
  }

  rules {
    action = "block"
    action_parameters {
      response {
        status_code  = 429
        content      = "{\"error\":\"auth_rate_limited\",\"retry_after\":300}"
        content_type = "application/json"
      }
    }
    ratelimit {
      characteristics     = ["cf.colo.id", "ip.src"]
      period              = 300
      requests_per_period = 50
      mitigation_timeout  = 300
    }
    expression  = "(http.host eq \"auth.grove.place\" and http.request.uri.path contains \"/oauth\")"
    description = "edge-auth: 50/5min by ip"
    enabled     = true
  }

  rules {
    action = "block"
    action_parameters {
      response {
        status_code  = 429
        content      = "{\"error\":\"upload_rate_limited\",\"retry_after\":3600}"
        content_type = "application/json"
      }
    }
    ratelimit {
      characteristics     = ["cf.colo.id", "ip.src"]
      period              = 3600
      requests_per_period = 100
      mitigation_timeout  = 3600
    }
    expression  = "(http.request.uri.path contains \"/api/upload\" or http.request.uri.path contains \"/api/images\")"
    description = "edge-uploads: 100/h by ip"
    enabled     = true
  }

  rules {
    action = "block"
    action_parameters {
      response {
        status_code  = 429
        content      = "{\"error\":\"ai_rate_limited\",\"retry_after\":86400}"
        content_type = "application/json"
      }
    }
    ratelimit {
      characteristics     = ["cf.colo.id", "ip.src"]
      period              = 86400
      requests_per_period = 500
      mitigation_timeout  = 3600
    }
    expression  = "(http.request.uri.path contains \"/api/ai/\" or http.request.uri.path contains \"/api/wisp/\")"
    description = "edge-ai: 500/day by ip"
    enabled     = true
  }
}
